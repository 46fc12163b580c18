"""Request bodies: JSON to typed fields and conversations."""
