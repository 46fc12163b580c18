"""Recipe of the embedded model ``hiserve-nano``: corpus, tokenizer, training, export, evaluation."""
