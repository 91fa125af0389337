"""Limits of GGUF files for the reader and the writer: stricter than the specification, larger than all real files.

The largest vocabularies have about 650,000 strings (tokens and merges), real files have fewer than 200 keys and a few
thousand tensors, and no known model has arrays inside arrays. Each entry takes time, or becomes a Python object
larger than its bytes in the file. The limits bound the cost of a file that contains only tiny entries.
"""

MAX_KEYS = 1 << 12
MAX_KEY_BYTES = 65_535  # specification
#: In all arrays together.
MAX_STRINGS = 1 << 21
MAX_NESTED_ARRAYS = 1 << 12
#: Depth of arrays inside arrays.
MAX_NESTING = 4

MAX_TENSORS = 1 << 14
MAX_NAME_BYTES = 63  # GGML_MAX_NAME is 64 with its terminating NUL
MAX_DIMS = 4  # GGML_MAX_DIMS

#: In bytes; powers of two.
DEFAULT_ALIGNMENT = 32
MIN_ALIGNMENT = 8  # specification: a multiple of 8; ggml: a power of two
MAX_ALIGNMENT = 1 << 21  # a large page of memory
