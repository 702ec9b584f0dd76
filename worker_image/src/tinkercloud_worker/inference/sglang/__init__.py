"""SGLang engines: requests (`sglang_dialect`), memory, base weights (`control`), and transfers.

A `delivery` chooses the transfer method. Modules are imported by their full names only: the name
`sglang` alone is SGLang's own package.
"""
