"""Float64 references of the parts of models, one file each; none calls a layer or a kernel.

A file has the name of the part's configuration in `arbcli.config.parts`.
"""
