"""The contracts between Tinkercloud's programs, and nothing else.

The API server, the operator and the session head are separate programs that may run different
releases. Everything that they exchange with each other or with the SDK is defined here once: ids
and `tinker://` paths, request and response models, the protobuf codec, the checkpoint manifest and
the head's launch configuration. The package uses no HTTP framework, no database and no torch; only
the modules of the extra `payloads` need NumPy and the SDK.
"""
