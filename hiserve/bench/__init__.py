"""Load generators, data sets, metrics and plots of ``hiserve bench``. Never imports torch."""
