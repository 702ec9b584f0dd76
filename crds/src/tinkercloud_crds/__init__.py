"""The custom resources of the API group `tinkercloud.dev`, as pydantic models.

`generate` writes the CustomResourceDefinitions, one folder up, from these models.
"""
