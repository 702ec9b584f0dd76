"""SGLang engines: requests (`dialect`), memory and base weights (`control`), transfer of weights.

A `delivery` chooses the transfer method. Modules are imported by their full names only: the name
`sglang` alone is SGLang's own package.
"""
