"""Faults and simulated machines for the tests; the program does not import them.

- `planting` changes one expression of a function, so that a check must fail. `planted_faults.txt`
  lists the faults: one for each class of mistakes, each kernel and each check of a model.
- `interpreter` makes Triton's interpreter fast enough for tests, and lets it refuse what a GPU does
  not forgive: an address outside of the arguments, a store that another thread may meet too early.
- `graphs` records and replays operations of torch as a CUDA graph does, without a GPU.
- `killing` kills runs over and over, and compares what is left with an undisturbed run.

A new apparatus has to find what no test finds without it. One that takes a page to explain, or that
repeats what a GPU or a user would see at once, does not belong here.
"""
