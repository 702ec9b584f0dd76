"""The custom resources of the group `tinkercloud.dev`, as pydantic models.

The YAML of their definitions, one folder up, is made from these models by `generate`.
"""
