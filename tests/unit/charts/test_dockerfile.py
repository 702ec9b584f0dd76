"""The commands of the Dockerfile work on the files that it copies."""

import os
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tinkercloud_testing.resources.charts import ROOT

UV_WITHOUT_CHANGES = f"""#!/usr/bin/env bash
echo "uv $*" >>"$UV_COMMANDS"
[ "$1" != sync ] || exec {ROOT}/.uv/bin/uv "$@" --dry-run --quiet
"""

DOCKERFILE = ROOT / "Dockerfile"
DEPENDENCIES = {
    **{target: target for target in ("api-server", "operator", "programs", "worker", "worker-cpu")},
    "recipes": "worker-cpu",
}
"""The target whose stage of dependencies an image is built on, by target."""
TARGETS = set(DEPENDENCIES)


def stages() -> dict[str, str]:
    """Return the text of each stage of the Dockerfile, by name, on one line for each command."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    parts = re.split(r"^FROM \S+ AS (\S+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


@pytest.mark.parametrize("target", ["worker", "worker-cpu"])
def test_an_image_of_workers_trains_with_every_backend(target: str) -> None:
    commands = stages()[f"deps-{target}"].splitlines()
    installing = [command for command in commands if re.search("^RUN.*sync(_on_cpu.sh)? ", command)]

    assert installing
    assert all("--extra megatron" in command for command in installing)


@pytest.mark.parametrize("target", ["api-server", "worker", "worker-cpu"])
def test_an_image_that_serves_requests_can_send_spans_of_them(target: str) -> None:
    installing = re.findall(r"^RUN.*sync(?:_on_cpu.sh)? .*", stages()[f"deps-{target}"], re.M)

    assert installing
    assert all("--extra telemetry" in command for command in installing)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_an_image_runs_what_its_own_stage_has_built_and_not_as_root(target: str) -> None:
    stage = stages()[target]

    assert f"COPY --from=build-{target} /own /opt/tinkercloud" in stage
    assert "USER 65532:65532" in stage
    assert "ENTRYPOINT" in stage


def test_images_have_a_name_for_their_user_whatever_its_id_is() -> None:
    # kopf and torch ask for it when they start.
    settings = stages()["runtime"]

    assert "tinkercloud:x:65532:65532" in settings
    assert re.search(r"ENV .*\bUSER=tinkercloud\b", settings)


@pytest.mark.parametrize("target", sorted(set(TARGETS) - {"recipes"}))
def test_the_dependencies_of_an_image_are_a_layer_below_our_packages(target: str) -> None:
    copies = [line for line in stages()[target].splitlines() if line.startswith("COPY")]

    assert copies == [
        f"COPY --from=deps-{target} /opt/tinkercloud /opt/tinkercloud",
        f"COPY --from=build-{target} /own /opt/tinkercloud",
    ]
    assert "/src" not in stages()[f"deps-{target}"]


def test_the_installation_page_builds_every_target() -> None:
    page = (ROOT / "docs" / "operate" / "installation.md").read_text()

    assert {target for _, target in re.findall(r"\b([\w-]+):([\w-]+)(?=[ ;])", page)} >= TARGETS


IGNORED = [
    line
    for line in (ROOT / ".dockerignore").read_text().splitlines()
    if line and not line.startswith("#")
]


@pytest.mark.parametrize("folder", [".git", ".venv", ".uv", ".run"])
def test_environments_and_state_are_not_sent_to_the_builder(folder: str) -> None:
    assert folder in IGNORED


def test_all_that_images_are_built_from_is_sent_to_the_builder() -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE.read_text(), re.MULTILINE)
    sources = [Path(name) for names in copied for name in names.split()]

    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []
    assert [
        source
        for source in sources
        if any(
            fnmatch(part, pattern.removeprefix("**/"))
            for pattern in IGNORED
            for part in source.parts
        )
    ] == []


def test_images_install_by_hash_and_their_base_may_be_named_by_digest() -> None:
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    script = (ROOT / "tools/images/sync_on_cpu.sh").read_text().replace("\\\n", " ")
    installs = [
        line
        for line in re.split(r"\n|&&", text + script)
        if re.search(r"\b(pip install|uv sync)\b", line)
    ]

    assert installs
    for install in installs:
        assert "uv sync --frozen" in install or "--require-hashes" in install, install
    bases = set(re.findall(r"^FROM (\S+)", text, re.MULTILINE))
    assert bases - stages().keys() == {"${BASE}", "${RUNTIME}"}


def test_the_installer_and_the_images_use_one_version_of_uv_whose_hashes_are_known() -> None:
    wanted = (ROOT / "tools" / "uv-requirements.txt").read_text()

    assert len(re.findall(r"^uv==[0-9.]+ ", wanted, re.MULTILINE)) == 1
    assert len(re.findall(r"^    --hash=sha256:[0-9a-f]{64}", wanted, re.MULTILINE)) > 1
    for path in [DOCKERFILE, ROOT / "tools" / "install.sh"]:
        assert "tools/uv-requirements.txt" in path.read_text()


def copy_into(context: Path, stage: str) -> None:
    """Copy what the COPY commands of a stage name, except into absolute paths."""
    for names, target in re.findall(r"^COPY (?!--from)(.+) ([^/\s]\S*)$", stage, re.MULTILINE):
        for name in names.split():
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, context / target)
            else:
                (context / target).mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, context / target)


@pytest.mark.parametrize("target", sorted(TARGETS))
def test_every_install_command_of_an_image_resolves_with_the_copied_files(
    target: str, tmp_path: Path
) -> None:
    context, programs, commands = (tmp_path / name for name in ("src", "bin", "commands"))
    programs.mkdir()
    (programs / "uv").write_text(UV_WITHOUT_CHANGES)
    (programs / "separate_own.sh").write_text('#!/usr/bin/env bash\nexec "$@"\n')
    for program in programs.iterdir():
        program.chmod(0o755)
    shutil.copy(ROOT / "tools/images/sync_on_cpu.sh", programs)
    stage = stages()[f"deps-{DEPENDENCIES[target]}"] + stages()[f"build-{target}"]
    copy_into(context, stages()["workspace"])
    copy_into(context, stage)
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "TORCH_INDEX": "https://torch.invalid/cpu",
        "TORCH_SHA256": "",
        "UV_COMMANDS": str(commands),
        "UV_NO_DEFAULT_GROUPS": "1",
        "UV_PROJECT_ENVIRONMENT": str(tmp_path / "environment"),
    }

    for command in re.findall(r"^RUN --mount=\S+ +(.+)$", stage, re.MULTILINE):
        subprocess.run(
            ["/bin/bash", "-eo", "pipefail", "-c", command],
            cwd=context,
            env=environment,
            check=True,
        )

    assert re.search(r"uv sync --frozen .*--package tinkercloud-", commands.read_text())


def test_the_bill_of_materials_lists_the_packages_of_every_image(tmp_path: Path) -> None:
    subprocess.run([ROOT / "tools" / "sbom.sh", tmp_path], check=True)

    assert {path.name for path in tmp_path.glob("*.cdx.json")} == {
        f"tinkercloud-{target}.cdx.json" for target in TARGETS
    }
    assert '"name": "authlib"' in (tmp_path / "tinkercloud-api-server.cdx.json").read_text()
    assert '"name": "megatron-core"' in (tmp_path / "tinkercloud-worker.cdx.json").read_text()
    assert "nvidia" not in (tmp_path / "tinkercloud-worker-cpu.cdx.json").read_text()
