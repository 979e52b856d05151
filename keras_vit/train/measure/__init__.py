"""Evaluation, few-shot accuracy, and the plan of memory and time."""
