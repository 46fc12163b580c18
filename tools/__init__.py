"""Programs that make parts of this repository: the embedded model, the page of settings."""
