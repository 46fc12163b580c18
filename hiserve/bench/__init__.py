"""Load generators, data sets, metrics and plots behind ``hiserve bench``. Never reaches torch."""
