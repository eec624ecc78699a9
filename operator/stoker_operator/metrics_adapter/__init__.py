"""The built-in custom metrics API: autoscalers read the engines' own gauges, with nothing else installed."""
