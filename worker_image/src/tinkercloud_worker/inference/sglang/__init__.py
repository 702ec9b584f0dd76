"""SGLang engines: how they are asked, controlled, and given weights.

A dialect asks, a control has the memory and the base weights, a delivery chooses how weights get
there. Modules are imported by their full names only: `sglang` alone is SGLang's own package.
"""
