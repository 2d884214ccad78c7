#!/bin/sh
# Sets ten example teams up, each with limits that fit its work, and makes one key for each. A key is printed once: hand
# it over, or keep the output somewhere safe. Needs tollgate on the PATH and a house with the models of the example
# tollgate.yaml (not `tollgate dev`, which has its own):
#
#   TOLLGATE_CONFIG=tollgate.yaml sh examples/teams.sh
#
set -eu

# People wait for these two: a larger share where teams compete, and only models that have earned it.
tollgate teams create search     --name "Search"           --weight 4 --usd-per-day 200 --usd-per-month 4000 \
    --requests-per-minute 1200 --tokens-per-minute 2000000 --concurrent-requests 200
tollgate teams create support    --name "Support desk"     --weight 4 --usd-per-day 150 --usd-per-month 3000 \
    --requests-per-minute 600 --concurrent-requests 100 --safety-input block --safety-output block

# Product teams with an everyday budget.
tollgate teams create checkout   --name "Checkout"         --weight 2 --usd-per-day 40  --usd-per-month 800 --models auto,gpt-4o-mini
tollgate teams create mobile     --name "Mobile apps"      --weight 2 --usd-per-day 60  --usd-per-month 1200
tollgate teams create onboarding --name "Onboarding"       --weight 2 --usd-per-day 25  --usd-per-month 500  --requests-per-minute 120
tollgate teams create docs       --name "Documentation"    --weight 1 --usd-per-month 300 --models auto,claude-haiku,claude-sonnet
tollgate teams create legal      --name "Legal"            --weight 1 --usd-per-month 600 --models claude-opus,claude-sonnet --no-smaller

# Night work: few requests at once, many tokens, on our own GPUs alone.
tollgate teams create analytics  --name "Analytics"        --weight 1 --tokens-per-day 500000000 --concurrent-requests 32 --models llama-3-70b
tollgate teams create ingest     --name "Catalogue ingest" --weight 1 --tokens-per-day 200000000 --models llama-3-70b,gpt-4o-mini

# People trying things out: a hard stop at a dollar a day.
tollgate teams create sandbox    --name "Sandbox"          --weight 0.5 --usd-per-day 1 --requests-per-minute 20 --concurrent-requests 2

for team in search support checkout mobile onboarding docs legal analytics ingest sandbox; do
    tollgate keys create --team "$team" --name "first key" --expires 365d
done
tollgate teams list
