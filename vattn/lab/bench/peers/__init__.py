"""Other engines as targets of the same load. None of them is a dependency: what is installed can be asked."""
