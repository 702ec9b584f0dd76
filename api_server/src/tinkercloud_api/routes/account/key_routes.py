"""The caller's own key, and access tokens for it."""

from fastapi import APIRouter

from tinkercloud_api.access.effects import READS, changes, declares, names_no_object, shows
from tinkercloud_api.catalog.schema.tables import now
from tinkercloud_api.context import Caller, Server
from tinkercloud_protocol.responses.account_listings import ConsoleLink, TokenAnswer
from tinkercloud_protocol.responses.listings import ApiKeyInfo

router = APIRouter(prefix="/api/v1/auth", tags=["keys"])


@router.post("/token")
@declares(READS)
@names_no_object
async def issue_token(server: Server, caller: Caller) -> TokenAnswer:
    """Return an access token (JWT) for the key of the request, which is valid for an hour."""
    return TokenAnswer(jwt=server.authenticator.token(caller))


@router.post("/console")
@declares(shows("console_open"))
@names_no_object
async def open_console(server: Server, caller: Caller) -> ConsoleLink:
    """Return a link that opens the console once, with the rights of the key of the request."""
    token = await server.browsers.link(caller, now())
    return ConsoleLink(path=f"/console/login?link={token}")


@router.get("/apikey/me")
@names_no_object
async def show_key(server: Server, caller: Caller) -> ApiKeyInfo:
    """Describe the key of the request."""
    details = {"org_details": {"name": "tinkercloud"}, "user_details": {"email": caller.owner}}
    return ApiKeyInfo(
        key_id=caller.key_id,
        name=caller.key_name,
        note=str(caller.role),
        details=details,
        expires_at=caller.expires_at,
        last_used_at=await server.catalog.last_use_of_key(caller.key_id),
    )


@router.delete("/apikey/me")
@declares(changes("key_revoke"))
@names_no_object
async def revoke_key(server: Server, caller: Caller) -> dict[str, str]:
    """Revoke the key of the request, which all replicas reject from the next request on."""
    await server.authenticator.revoke(caller)
    caller.named_objects.add(f"key {caller.key_id}")
    return {}
