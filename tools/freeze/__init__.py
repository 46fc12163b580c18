"""Records plans, results and answers of the engine and its server, to show that a change of the code leaves them equal."""
