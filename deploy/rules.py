# Writes deploy/alerts.yml in the shape of the Prometheus operator: `make rules`, after a change of an alert.

from __future__ import annotations

import textwrap
from pathlib import Path

HEAD = """\
# Written by `make rules` from deploy/alerts.yml: change that one.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata: {name: tollgate}
spec:
"""


def rules(folder: Path) -> str:
    """Return the alerts of ``folder`` as a PrometheusRule, with the same comments."""
    return HEAD + textwrap.indent((folder / "alerts.yml").read_text(), "  ")


if __name__ == "__main__":
    deploy = Path(__file__).parent
    (deploy / "kubernetes" / "monitoring" / "rules.yaml").write_text(rules(deploy))
