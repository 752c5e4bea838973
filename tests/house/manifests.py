"""Renders the plain manifests from the chart: ``python -m tests.house.manifests``.

Each file of ``deploy/helm/presets`` has the values of the folder in ``deploy`` that has its name.
"""

from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
CHART = DEPLOY / "helm"
HEADER = "# Rendered from deploy/helm, which has more settings.\n"
FLEET = """# A fleet file, rendered from deploy/helm. CHANGE `model`, `api_keys`, `redis` as needed,
# and each `insecure: true`, which is plain text: `tls` with mounted certificates replaces it.
"""


def helm() -> Any:
    """Import Helm, whose library starts threads of its own in this process."""
    return import_module("helm_python")


def rendered(values: dict[str, Any], name: str = "baton", **options: Any) -> dict[str, str]:
    """Render the chart's templates, by file name; those that are empty are left out."""
    with helm().Chart.load(CHART) as chart:
        files = chart.render(values, name=name, namespace="baton", **options)
    texts = {Path(path).name: text.strip() for path, text in files.items()}
    return {file: text for file, text in texts.items() if text and file != "NOTES.txt"}


def documents(values: dict[str, Any], name: str = "baton", **options: Any) -> list[dict[str, Any]]:
    """Render the chart, and return its objects."""
    texts = rendered(values, name, **options).values()
    return [found for text in texts for found in yaml.safe_load_all(text) if found is not None]


def fleet_file(objects: list[dict[str, Any]]) -> str:
    """Return the text of the fleet file in the only Secret."""
    (secret,) = (each for each in objects if each["kind"] == "Secret")
    text: str = secret["stringData"]["fleet.yaml"]
    return text


def plain_files() -> dict[Path, str]:
    """Return the text of each plain manifest."""
    files = {}
    for preset in sorted((CHART / "presets").glob("*.yaml")):
        values = yaml.safe_load(preset.read_text())
        for name, text in rendered(values).items():
            lines = (line.rstrip() for line in text.removeprefix("---").strip().splitlines())
            files[DEPLOY / preset.stem / name] = HEADER + "\n".join(lines) + "\n"
        fleet = FLEET + fleet_file(documents(values))
        files[DEPLOY / preset.stem / "fleet.yaml"] = fleet.strip() + "\n"
    return files


if __name__ == "__main__":
    for path, text in plain_files().items():
        path.write_text(text)
        print(f"wrote {path}")
