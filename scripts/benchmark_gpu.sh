#!/usr/bin/env bash
# The suites learner and endtoend with the learner on one GPU, in under five minutes: updates and whole runs beside a
# bare loop and stable-baselines3 on the same GPU, replay on the device, bfloat16. Results: learner.json, endtoend.json.
#
#   scripts/benchmark_gpu.sh FOLDER           # on a machine with a GPU
#   scripts/benchmark_gpu.sh FOLDER --cpu     # the same commands on the CPU, for seconds: does everything run?
#
# PYTHON: interpreter (default: .venv/bin/python). AGAINST: packages whose environments exist (default: none).
set -euo pipefail
cd "$(dirname "$0")/.."

folder=${1:?give a folder for the results, as in: scripts/benchmark_gpu.sh runs/gpu}
mkdir -p "$folder"
python=${PYTHON:-.venv/bin/python}
learner=(--no-compile --rounds 5 --seconds 1 --groups td3,td3_large,options,publish)
endtoend=(--pairs 5 --steps 1000 --groups spi_32)
device=(--accelerator gpu --replay-device cuda --precision bf16-mixed)
if [[ ${2:-} == --cpu ]]; then
    learner=(--quick --groups publish)
    endtoend=(--quick --groups spi_32)
    device=(--accelerator cpu --replay-device cpu --precision 32-true)
elif [[ -n ${2:-} ]]; then
    echo "benchmark_gpu.sh: error: $2: only --cpu is known here" >&2
    exit 2
fi

for suite in learner endtoend; do
    declare -n chosen=$suite
    "$python" scripts/benchmark.py "$suite" "${chosen[@]}" "${device[@]}" --strict --against "${AGAINST:-none}" \
        --json "$folder/$suite.json"
done
"$python" scripts/benchmark.py table "$folder/learner.json" "$folder/endtoend.json"
