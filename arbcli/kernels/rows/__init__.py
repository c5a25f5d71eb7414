"""Row lookups, weighted sums, gathers and scatters."""
