"""A real OpenID provider on this machine, whose answers a test can falsify."""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qs

import flask
import oidc_provider_mock
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from joserfc import jwt
from joserfc.jwk import RSAKey
from werkzeug.serving import make_server


@dataclass
class Provider:
    """A running provider. `users` log in by their subject."""

    issuer: str = ""
    falsify: Callable[["Provider", str], str] = field(default=lambda _provider, token: token)
    """Changes each ID token before it is sent."""
    is_failing: bool = False
    """Whether all requests fail."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Replaces parts of what the provider says of itself."""
    keys: list[dict[str, Any]] | None = None
    """Replaces the keys that the provider shows."""
    key: RSAKey | None = None
    challenges: list[str] = field(default_factory=list)
    """PKCE challenges of the authorization requests."""
    proofs: list[str] = field(default_factory=list)
    """The challenges that the token requests have proven to know."""

    def signed(self, claims: dict[str, Any]) -> str:
        """Return a token with the signature of the provider."""
        assert self.key is not None
        return jwt.encode({"alg": "RS256", "kid": self.key.kid}, claims, self.key)

    def claims(self, token: str) -> dict[str, Any]:
        """Return the claims of a token of the provider."""
        assert self.key is not None
        return dict(jwt.decode(token, self.key, algorithms=["RS256"]).claims)


def changed(**claims: Any) -> Callable[[Provider, str], str]:
    """Return what replaces claims of an ID token, and signs it as the provider does."""

    def change(provider: Provider, token: str) -> str:
        kept = {**provider.claims(token), **claims}
        return provider.signed({name: value for name, value in kept.items() if value is not None})

    return change


@contextlib.contextmanager
def a_provider(users: dict[str, dict[str, object]]) -> Iterator[Provider]:
    """Run a provider with accounts, by subject, with their claims."""
    accounts = [oidc_provider_mock.User(sub=sub, claims=claims) for sub, claims in users.items()]
    app = oidc_provider_mock.app(require_nonce=True, user_claims=accounts)
    provider = Provider()

    def observe() -> flask.Response | None:
        if provider.is_failing:
            return flask.Response("out of order", 500)
        jwk = flask.g.oidc_provider_mock_storage.jwk
        provider.key = RSAKey.import_key(jwk.as_dict(is_private=True))
        if challenge := flask.request.args.get("code_challenge"):
            provider.challenges.append(challenge)
        if flask.request.path == "/oauth2/token":
            form = parse_qs(flask.request.get_data(as_text=True, cache=True))
            provider.proofs += [create_s256_code_challenge(v) for v in form["code_verifier"]]
        return None

    def falsify(answer: flask.Response) -> flask.Response:
        content = answer.get_json(silent=True) if answer.is_json else None
        if isinstance(content, dict) and "id_token" in content:
            content["id_token"] = provider.falsify(provider, content["id_token"])
            answer.set_data(json.dumps(content))
        if provider.keys is not None and "keys" in (content or {}):
            answer.set_data(json.dumps({"keys": provider.keys}))
        if flask.request.path.startswith("/.well-known"):
            answer.set_data(json.dumps({**(content or {}), **provider.metadata}))
        return answer

    app.before_request(observe)
    app.after_request(falsify)
    # The plain application, without the debugger that the provider wraps it in.
    server = make_server("127.0.0.1", 0, flask.Flask.wsgi_app.__get__(app), threaded=True)
    provider.issuer = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
