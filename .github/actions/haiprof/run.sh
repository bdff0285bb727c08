#!/usr/bin/env bash
# Trains under haiprof, compares with a baseline, and writes both into a Markdown summary.
# HAIPROF_CI_COMMAND, _NAME, _LOG_DIR, _BASELINE, _LIMIT, _STRICT, _SUMMARY; see docs/ci.md.
set -uo pipefail

command=${HAIPROF_CI_COMMAND:?the training command, which ends by itself after some steps}
name=${HAIPROF_CI_NAME:-ci}
log_dir=${HAIPROF_CI_LOG_DIR:-haiprof-logs}
limit=${HAIPROF_CI_LIMIT:-5%}
summary=${HAIPROF_CI_SUMMARY:-${GITHUB_STEP_SUMMARY:-haiprof-summary.md}}
haiprof=${HAIPROF_CI_HAIPROF:-haiprof}

block() { # title, file: folded in the summary, as it was printed
    printf '<details><summary>%s</summary>\n\n~~~text\n' "$1"
    cat "$2"
    printf '~~~\n</details>\n\n'
}

out=$(mktemp -d)
trap 'rm -rf "$out"' EXIT

eval "$haiprof --log-dir \"\$log_dir\" --name \"\$name\" -- $command"
job=$?
run=$(ls -d "$log_dir/$name"-[0-9]*/ 2>/dev/null | tail -n 1)
if [ -z "$run" ]; then
    echo "### haiprof: the job was not recorded (exit status $job)" >> "$summary"
    exit "$((job ? job : 5))"
fi
NO_COLOR=1 $haiprof verdict "$run" > "$out/verdict" 2>&1
if [ "$job" -ne 0 ]; then
    { echo "### haiprof: the job ended with exit status $job"; block Verdict "$out/verdict"; } >> "$summary"
    exit "$job"
fi

NO_COLOR=1 $haiprof compare "$run" --baseline "${HAIPROF_CI_BASELINE:-last-good}" \
    --fail-if-slower "$limit" > "$out/compare" 2>&1
status=$?
case $status in
    0) title="not slower than $limit" ;;
    10) title="slower than $limit" ;;
    5) title="not decided whether it is slower than $limit" ;;
    *) title="no comparison (exit status $status)" ;;
esac
{
    echo "### haiprof: $title"
    block Comparison "$out/compare"
    block Verdict "$out/verdict"
} >> "$summary"
cat "$out/compare"
# Without a baseline, as in the first run, and where noise is too large nothing is claimed.
if [ "$status" -eq 5 ] && [ "${HAIPROF_CI_STRICT:-false}" != true ]; then
    exit 0
fi
exit "$status"
