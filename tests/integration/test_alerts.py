# deploy/alerts.yml and deploy/grafana.json speak of metrics that there are; and, by Prometheus's own promtool where it
# is installed, each alert fires for what it is there for and a healthy house is left in peace.

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.telemetry.metrics import Metrics

ROOT = Path(__file__).parents[2]
RULES: list[dict[str, Any]] = yaml.safe_load((ROOT / "deploy" / "alerts.yml").read_text())["groups"][0]["rules"]
BOARD = json.loads((ROOT / "deploy" / "grafana.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
EXPRESSIONS = [rule["expr"] for rule in RULES] + [one["expr"] for panel in PANELS for one in panel["targets"]]
NAME = re.compile(r"\b(?:tollgate_|vllm:|gen_ai_(?:client|server)_)\w+")
LABEL = re.compile(r"(\w+)=~?\"|(\w+)!=\"")
GROUPED = re.compile(r"by \(([\w, ]+)\)")
FROM_PROMETHEUS = {"job", "instance", "le"}
PROMTOOL = shutil.which("promtool")

# For each alert what makes it fire, as promtool writes series: a value, then how it goes on, each minute.
TROUBLE: dict[str, dict[str, str]] = {
    "ProcessDown": {'up{job="engine", instance="e"}': "0x200"},
    "NobodyThere": {'up{job="gateway", instance="g"}': "1x200"},
    "CallsFail": {
        'tollgate_calls_total{model="m", status="failed"}': "0+60x200",
        'tollgate_calls_total{model="m", status="answered"}': "0+600x200",
    },
    "GatewayErrors": {'tollgate_http_requests_total{status="500"}': "0+1x200"},
    "CallsShed": {'tollgate_shed_total{model="m", reason="expired"}': "0+5x200"},
    "BreakerOpen": {'tollgate_breaker_state{provider="p", endpoint="e", model="m"}': "2x200"},
    "ProviderRefusesKey": {'tollgate_keys_set_aside{provider="p", reason="refused_key"}': "1x200"},
    "GatewayIsSlow": {
        'tollgate_overhead_seconds_bucket{le="0.05"}': "0+60x200",
        'tollgate_overhead_seconds_bucket{le="0.25"}': "0+120x200",
        'tollgate_overhead_seconds_bucket{le="+Inf"}': "0+120x200",
    },
    "LedgerIsBehind": {'tollgate_journal_backlog{instance="g"}': "7x200"},
    "StoreAway": {"tollgate_quotas_standalone": "1x200"},
    "BooksDiffer": {'tollgate_books_differ{book="counters"}': "2x200"},
    "NobodyAudits": {"tollgate_books_audited_timestamp_seconds": "0x200"},
    "MoneyNeedsEyes": {"tollgate_journals_damaged_total": "0x100 1x100"},
    "ConfigRefused": {'tollgate_config_reloads_total{outcome="refused"}': "0x115 1x100"},
    "BudgetNearlySpent": {'tollgate_budget_used_ratio{team="t", limit="usd_per_day"}': "0.95x200"},
    "BatchesStandStill": {
        'tollgate_batch_requests_left{priority="low"}': "9x200",
        "tollgate_batch_requests_running": "0x200",
    },
    "CallbacksFail": {'tollgate_callbacks_waiting{state="failed"}': "3x200"},
    "EngineDown": {'tollgate_engine_up{model_name="m"}': "0x200"},
    "PoolEmpty": {'tollgate_fleet_replicas{pool="own", state="active"}': "2x5 0x200"},
    "RolloutRolledBack": {'tollgate_fleet_rollout{pool="own", state="rolled_back"}': "0x100 1x100"},
    "RolloutStuck": {'tollgate_fleet_rollout{pool="own", state="stuck"}': "0x100 1x100"},
    "EngineDies": {'tollgate_engine_restarts_total{model_name="m"}': "0x100 1x100"},
    "EngineIsUnfair": {
        'tollgate_engine_service_gap{model_name="m", tier="batch"}': "9x200",
        'tollgate_engine_service_bound{model_name="m", tier="batch"}': "8x200",
    },
}
PEACE = {
    **{f'up{{job="{job}", instance="a"}}': "1x200" for job in ("gateway", "worker", "engine")},
    'tollgate_calls_total{model="m", status="failed"}': "0+1x200",
    'tollgate_calls_total{model="m", status="answered"}': "0+600x200",
    'tollgate_http_requests_total{status="200"}': "0+600x200",
    'tollgate_shed_total{model="m", reason="expired"}': "5x200",
    'tollgate_breaker_state{provider="p", endpoint="e", model="m"}': "2x5 0x200",
    'tollgate_overhead_seconds_bucket{le="0.05"}': "0+600x200",
    'tollgate_overhead_seconds_bucket{le="+Inf"}': "0+600x200",
    'tollgate_journal_backlog{instance="g"}': "7 0 0 9 0x200",
    "tollgate_quotas_standalone": "0x200",
    'tollgate_books_differ{book="counters"}': "0x200",
    "tollgate_books_audited_timestamp_seconds": "0+60x200",
    "tollgate_journals_damaged_total": "1x200",
    'tollgate_budget_used_ratio{team="t", limit="usd_per_day"}': "0.5x200",
    'tollgate_batch_requests_left{priority="low"}': "9x200",
    "tollgate_batch_requests_running": "4x200",
    'tollgate_engine_up{model_name="m"}': "1x200",
    'tollgate_fleet_replicas{pool="own", state="active"}': "2x200",
    'tollgate_engine_restarts_total{model_name="m"}': "1x200",
}


def known() -> dict[str, set[str] | None]:
    """Return every name that a scrape may show with its labels, ``None`` where only the name is known here."""
    sources = [ROOT / "gateway" / "run" / "work_metrics.py", *(ROOT / "gpu_backend" / "server").rglob("*metrics.py")]
    names: dict[str, set[str] | None] = {"tollgate_engine_service_gap": None, "tollgate_engine_service_bound": None}
    for name in (name for source in sources for name in NAME.findall(source.read_text())):
        names |= dict.fromkeys((name, f"{name}_total", f"{name}_bucket", f"{name}_count", f"{name}_sum"))
    for metric, shown in Metrics().registry._collector_to_names.items():
        names |= {name: set(metric._labelnames) for name in shown}  # type: ignore[attr-defined]
    return names


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_every_metric_and_label_is_there(expression: str) -> None:
    """What was renamed would be an alert that never comes, or an empty panel."""
    names, said = known(), set(NAME.findall(expression))
    labels = {first or second for first, second in LABEL.findall(expression)}
    labels |= {label.strip() for group in GROUPED.findall(expression) for label in group.split(",")}
    ours = [names[name] for name in said & names.keys()]

    assert said <= names.keys()
    if None not in ours:
        assert labels <= FROM_PROMETHEUS | {label for of_one in ours for label in of_one or ()}


def test_every_metric_is_explained() -> None:
    """Each metric of a gateway stands in the documentation, under the name that a scrape shows."""
    told = "".join(page.read_text() for page in (ROOT / "docs").rglob("*.md"))
    names = {max(shown, key=len) for shown in Metrics().registry._collector_to_names.values()}
    names = {re.sub("_(bucket|created)$", "", name) for name in names}

    assert {name for name in names if name not in told and name + "_total" not in told} == set()


def test_every_alert_is_tried_and_says_what_is_wrong() -> None:
    """Each has its case here, a severity, and a sentence for people."""
    assert [rule["alert"] for rule in RULES] == list(TROUBLE)
    assert {rule["labels"]["severity"] for rule in RULES} == {"page", "ticket"}
    assert all(rule["annotations"]["summary"].endswith(".") for rule in RULES)
    runbook = "docs/operations/runbook.md"
    anchors = {
        f"{runbook}#{line[3:].lower()}" for line in (ROOT / runbook).read_text().splitlines() if line[:3] == "## "
    }
    assert [rule["annotations"]["runbook_url"] for rule in RULES] == [
        f"{runbook}#{rule['alert'].lower()}" for rule in RULES
    ]
    assert {rule["annotations"]["runbook_url"] for rule in RULES} <= anchors


@pytest.mark.skipif(PROMTOOL is None, reason="SKIPPED: no promtool, which comes with Prometheus")
def test_alerts_fire_for_what_they_are_there_for(tmp_path: Path) -> None:
    """Two hours of each trouble, and two of a healthy house, evaluated by Prometheus's own rules."""
    cases = [
        series_test(series, f'count(ALERTS{{alertname="{alert}", alertstate="firing"}})', fires=True)
        for alert, series in TROUBLE.items()
    ]
    cases.append(series_test(PEACE, 'count(ALERTS{alertstate="firing"})', fires=False))
    file = tmp_path / "tests.yml"
    file.write_text(yaml.safe_dump({"rule_files": [str(ROOT / "deploy" / "alerts.yml")], "tests": cases}))

    done = subprocess.run([str(PROMTOOL), "test", "rules", str(file)], capture_output=True, text=True)

    assert done.returncode == 0, done.stdout + done.stderr


def series_test(series: dict[str, str], expression: str, *, fires: bool) -> dict[str, Any]:
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": expression,
                "eval_time": "2h",
                "exp_samples": [{"labels": "{}", "value": 1}] if fires else [],
            }
        ],
    }


def test_panels_have_places_of_their_own() -> None:
    """Nothing lies upon anything else, and each panel asks Prometheus something."""
    taken: set[tuple[int, int]] = set()
    for panel in BOARD["panels"]:
        place = panel["gridPos"]
        across, down = range(place["x"], place["x"] + place["w"]), range(place["y"], place["y"] + place["h"])
        mine = {(x, y) for x in across for y in down}
        assert not mine & taken and across.stop <= 24, panel["title"]
        taken |= mine

    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    assert all(panel["targets"] for panel in PANELS)
