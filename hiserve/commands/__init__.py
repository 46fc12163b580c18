"""One file a command of the `hiserve` command line."""
