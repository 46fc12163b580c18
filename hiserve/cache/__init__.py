"""The radix prefix cache: an index that decides and pools that hold the bytes."""
