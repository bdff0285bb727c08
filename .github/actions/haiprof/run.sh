#!/usr/bin/env bash
# Trains under haiprof, compares with a baseline, and writes both as Markdown into a file, and into GitHub's step
# summary. HAIPROF_CI_COMMAND, _NAME, _LOG_DIR, _BASELINE, _LIMIT, _STRICT, _SUMMARY; see docs/ci.md.
set -uo pipefail

command=${HAIPROF_CI_COMMAND:?the training command, which ends by itself after some steps}
name=${HAIPROF_CI_NAME:-ci}
log_dir=${HAIPROF_CI_LOG_DIR:-haiprof-logs}
limit=${HAIPROF_CI_LIMIT:-5%}
summary=${HAIPROF_CI_SUMMARY:-haiprof-summary.md}
haiprof=${HAIPROF_CI_HAIPROF:-haiprof}

finish() { # exit status, title
    { echo "### haiprof: $2"; echo; cat "$out"/*; } > "$summary"
    [ -z "${GITHUB_STEP_SUMMARY:-}" ] || cat "$summary" >> "$GITHUB_STEP_SUMMARY"
    [ -z "${GITHUB_OUTPUT:-}" ] || printf 'summary=%s\nstatus=%s\n' "$summary" "$1" >> "$GITHUB_OUTPUT"
    echo "haiprof: $2"
    exit "$1"
}

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT
touch "$out/0"

before=$(ls -d "$log_dir/$name"-[0-9]*/ 2>/dev/null)
eval "$haiprof --log-dir \"\$log_dir\" --name \"\$name\" -- $command"
job=$?
run=$(ls -d "$log_dir/$name"-[0-9]*/ 2>/dev/null | grep -vxF "${before:-none}" | tail -n 1)
[ -n "$run" ] || finish "$((job ? job : 5))" "the job was not recorded (exit status $job)"
$haiprof verdict "$run" --format markdown > "$out/2-verdict"
[ "$job" -eq 0 ] || finish "$job" "the job ended with exit status $job"

$haiprof compare "$run" --baseline "${HAIPROF_CI_BASELINE:-last-good}" \
    --fail-if-slower "$limit" --format markdown > "$out/1-comparison" 2> "$out/why"
status=$?
cat "$out/why" >&2
case $status in
    0) title="not slower than $limit" ;;
    10) title="slower than $limit" ;;
    5) title="not decided whether it is slower than $limit" ;;
    *) title="no comparison (exit status $status)" ;;
esac
[ -s "$out/1-comparison" ] || sed 's/^/    /' "$out/why" > "$out/1-comparison"
rm "$out/why"
# Without a baseline, as in the first run, and where noise is too large nothing is claimed.
[ "$status" -ne 5 ] || [ "${HAIPROF_CI_STRICT:-false}" = true ] || status=0
finish "$status" "$title"
