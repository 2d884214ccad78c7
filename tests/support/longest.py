# Which test files take longest, and which a process should run together. What takes longest is begun first, so that the
# processes end at about the same time: seconds in a whole run by four processes on two cores with little beside it.
# Only their order matters; measured by `--durations=0`.

from __future__ import annotations

SECONDS = {
    "unit/test_growth.py": 141,
    "faults/test_money.py": 134,
    "integration/test_leaving_anywhere.py": 95,
    "acceptance/test_hostile_bodies.py": 90,
    "integration/gpu_backend/test_gpu_suite.py": 86,
    "acceptance/test_batches.py": 80,
    "simulation/test_simulation.py": 73,
    "faults/test_dev_lifecycle.py": 69,
    "integration/gpu_backend/test_generation.py": 61,
    "acceptance/test_refused_statements.py": 59,
    "faults/test_idempotency.py": 49,
    "faults/test_serve_lifecycle.py": 42,
    "integration/test_provider_batches.py": 41,
    "acceptance/test_engine_front.py": 40,
    "integration/test_lease_races.py": 40,
    "integration/test_compose.py": 38,
    "acceptance/test_mcp.py": 36,
    "simulation/test_planted.py": 35,
    "integration/gpu_backend/test_speculation.py": 34,
    "acceptance/test_fault_table.py": 33,
    "acceptance/test_broken_upstreams.py": 31,
    "integration/test_migrate_command.py": 31,
    "unit/gpu_backend/server/checkpoint/test_control_tokens.py": 31,
    "wire/test_conformance.py": 31,
    "faults/test_reload.py": 29,
    "integration/test_refusals.py": 29,
    "integration/test_release.py": 29,
    "unit/gpu_backend/execution/test_graphs.py": 28,
    "integration/test_audit.py": 27,
    "acceptance/test_cache.py": 25,
    "integration/gpu_backend/test_structured.py": 24,
    "integration/test_embedded.py": 24,
    "acceptance/test_continuation.py": 24,
    "unit/gpu_backend/kv_cache/test_eviction.py": 24,
    "integration/test_auth.py": 22,
    "unit/gateway/moderation/classifier/test_classifier.py": 22,
    "integration/gpu_backend/test_engine_process.py": 21,
    "integration/test_worker.py": 21,
    "acceptance/test_safety.py": 20,
    "integration/gpu_backend/test_composition.py": 20,
    "integration/test_docs_drills.py": 20,
    "acceptance/test_engine_tools.py": 20,
    "acceptance/test_failover.py": 20,
    "integration/test_migrations.py": 19,
    "acceptance/test_idempotency.py": 19,
    "acceptance/test_true_cost.py": 19,
    "acceptance/test_canaries.py": 18,
    "integration/test_flusher.py": 18,
    "integration/test_leases.py": 17,
    "integration/test_shadow.py": 17,
    "acceptance/test_demo.py": 17,
    "integration/test_backup.py": 17,
    "integration/gpu_backend/test_logits.py": 16,
    "simulation/test_search.py": 16,
    "integration/test_admin_cli.py": 16,
    "unit/gpu_backend/speculation/test_planner.py": 16,
    "integration/test_batch_store.py": 16,
    "simulation/test_sql_model.py": 16,
    "acceptance/test_streams.py": 16,
    "integration/gpu_backend/test_demo_answers.py": 16,
    "integration/test_quotas.py": 16,
    "integration/test_http_server.py": 15,
}

# What is imported or started by the first test that needs it, once in each process that runs one, with the seconds of
# CPU that this takes; and whose tests do. The files of each go to one process: the others never pay for it.
TOGETHER = {
    "models of transformers, sympy and torch's compiler (5), scikit-learn (2)": (
        "integration/gpu_backend/test_demo_answers.py",
        "integration/gpu_backend/test_generation.py",
        "integration/gpu_backend/test_gpu_suite.py",
        "integration/gpu_backend/test_logits.py",
        "integration/gpu_backend/test_lora.py",
        "integration/gpu_backend/test_pictures.py",
        "unit/gateway/moderation/classifier/test_classifier.py",
        "unit/gpu_backend/hardware/test_memory_reserve.py",
        "unit/gpu_backend/models/test_draft_heads.py",
        "unit/gpu_backend/models/test_experts.py",
        "unit/gpu_backend/models/test_models.py",
        "unit/gpu_backend/sampling/test_adjustments.py",
        "unit/gpu_backend/server/checkpoint/test_chat_template.py",
        "unit/router/complexity/test_classifier.py",
        "unit/tools/complexity_training/test_baselines.py",
        "unit/tools/complexity_training/test_replay.py",
    ),
    "Anthropic's client (1.5), services forked from a process of theirs (1.5)": (
        "acceptance/test_another_endpoint.py",
        "acceptance/test_anthropic_documents.py",
        "acceptance/test_anthropic_sdk.py",
        "acceptance/test_batches.py",
        "acceptance/test_canaries.py",
        "acceptance/test_clients_defaults.py",
        "acceptance/test_docs_commands.py",
        "acceptance/test_hostile_bodies.py",
        "acceptance/test_idempotency_without_postgres.py",
        "acceptance/test_left_out.py",
        "acceptance/test_refused_statements.py",
        "faults/test_idempotency.py",
        "faults/test_money.py",
        "integration/test_forked_services.py",
    ),
}
GROUPS = {path: name for name, paths in TOGETHER.items() for path in paths}


def group_of(path: str) -> str:
    """Return what the tests of a file, by its path in `tests`, are run together with: the file alone, or a group."""
    return GROUPS.get(path, path)


def seconds_of(group: str) -> float:
    """Return how long a file or a group takes."""
    return sum(SECONDS.get(path, 0) for path in TOGETHER.get(group, (group,)))
