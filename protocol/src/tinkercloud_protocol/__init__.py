"""What Tinkercloud's programs must agree on, and nothing else.

The API server, the operator and the session head are separate programs that may run different
releases. Everything that crosses between them, or between them and the SDK, is defined here once:
ids and `tinker://` paths, request and answer models, the protobuf codec, the checkpoint manifest
and the head's launch configuration. The package knows no HTTP framework, no database and no torch.
"""
