//! libcublasLt: the matrix products that the burn uses.
