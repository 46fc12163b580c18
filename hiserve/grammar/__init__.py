"""Grammars of replies: compiled, followed token by token, and tried out before an engine sees them."""
