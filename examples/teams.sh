#!/bin/sh
# Sets ten example teams up, each with limits that fit its work, and makes one key for each. A key is printed once: hand
# it over, or keep the output somewhere safe. What is there already stays as it is, so it may run again. Needs tollgate
# on the PATH, and runs with any deployment that has the route `auto`, `tollgate dev` in this folder too:
#
#   sh examples/teams.sh
#
# SMALL, LARGE and OWN are the models that some teams are kept to. With those of the example tollgate.yaml:
#
#   TOLLGATE_CONFIG=tollgate.yaml SMALL=auto,gpt-4o-mini LARGE=claude-opus,claude-sonnet OWN=llama-3-70b sh examples/teams.sh
#
set -eu
SMALL=${SMALL:-auto} LARGE=${LARGE:-auto} OWN=${OWN:-auto}

teams=$(tollgate teams list --format csv | cut -d, -f1)
keyed=$(tollgate keys list --format csv | cut -d, -f2)

# team ID OPTION…: makes a team that is not there, and a key for one that has none.
team() {
    printf '%s\n' "$teams" | grep -qx "$1" || tollgate teams create "$@"
    printf '%s\n' "$keyed" | grep -qx "$1" || tollgate keys create --team "$1" --name "first key" --expires 365d
}

# Users wait for these two: a larger share where teams compete, and only models that have earned it.
team search     --name "Search"           --weight 4 --usd-per-day 200 --usd-per-month 4000 \
    --requests-per-minute 1200 --tokens-per-minute 2000000 --concurrent-requests 200
team support    --name "Support desk"     --weight 4 --usd-per-day 150 --usd-per-month 3000 \
    --requests-per-minute 600 --concurrent-requests 100 --safety-input block --safety-output block

# Product teams with an everyday budget.
team checkout   --name "Checkout"         --weight 2 --usd-per-day 40  --usd-per-month 800 --models "$SMALL"
team mobile     --name "Mobile apps"      --weight 2 --usd-per-day 60  --usd-per-month 1200
team onboarding --name "Onboarding"       --weight 2 --usd-per-day 25  --usd-per-month 500  --requests-per-minute 120
team docs       --name "Documentation"    --weight 1 --usd-per-month 300 --models "$SMALL"
team legal      --name "Legal"            --weight 1 --usd-per-month 600 --models "$LARGE" --no-smaller

# Night work: few requests at once, many tokens, on our own GPUs alone.
team analytics  --name "Analytics"        --weight 1 --tokens-per-day 500000000 --concurrent-requests 32 --models "$OWN"
team ingest     --name "Catalogue ingest" --weight 1 --tokens-per-day 200000000 --models "$OWN"

# Users trying things out: a hard stop at a dollar a day.
team sandbox    --name "Sandbox"          --weight 0.5 --usd-per-day 1 --requests-per-minute 20 --concurrent-requests 2

tollgate teams list
