"""Operations along a sequence: a scan with decay, and a short convolution."""
