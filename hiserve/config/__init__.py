"""Every option with its flag, help, range and default; and settings, where each option has its value."""
