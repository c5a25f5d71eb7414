"""Several residual streams, mixed by hyper-connections."""
