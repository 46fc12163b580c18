"""Decides which requests run where and when; supervises the workers."""
