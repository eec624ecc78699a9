"""What sampling costs: rounds of each way to choose tokens beside greedy ones, and whether what was chosen may be."""
