"""What the scheduler and the executor exchange: the batch of a step and what comes back. Plain data, no torch.

Must never know: who decided it, what runs it. What an executor must be able to do is `engine/executor_protocol.py`.
"""
