"""Engines under the control of others: where their requests go, and adapters."""
