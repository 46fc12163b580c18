"""SGLang's ``/generate``."""
