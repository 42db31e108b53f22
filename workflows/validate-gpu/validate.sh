#!/usr/bin/env bash
# Runs gpu-validator in a GitHub Actions step; action.yml says what the INPUT_ variables mean. The step's outputs are
# written before the step can fail, so that the reports are kept and a later step can ask for the verdict.
set -euo pipefail

output() {
  echo "$1=$2" >>"$GITHUB_OUTPUT"
}

# An error that is not a finding: the runner or the workflow must be mended, not the GPU.
stop() {
  echo "::error title=gpu-validator::$1"
  exit 1
}

# Nothing is known until the validator has said so, and a step that dies must not leave an old verdict or none.
output verdict not_judged

case "$INPUT_FAIL_ON" in
  not-pass | not-judged | fail) ;;
  *) stop "fail-on is '$INPUT_FAIL_ON'; it must be not-pass, not-judged or fail" ;;
esac
case "$INPUT_ALLOW_SIMULATED" in
  true | false) ;;
  *) stop "allow-simulated is '$INPUT_ALLOW_SIMULATED'; it must be true or false" ;;
esac

# `gpu-validator --version` also names the commit; the number is the second word.
version_of() {
  "$1" --version | awk 'NR == 1 { print $2 }'
}

# The checksum comes from the workflow, not from where the binary comes from: whoever can change a release cannot change it.
download() {
  local folder path file sum
  [[ "$INPUT_VERSION" =~ ^[0-9]+\.[0-9]+\.[0-9]+$ ]] || stop "sha256 needs version, such as 0.1.0; it is '$INPUT_VERSION'"
  case "$(uname -m)" in
    x86_64) file=gpu-validator sum=$INPUT_SHA256 ;;
    aarch64) file=gpu-validator-aarch64 sum=${INPUT_SHA256_AARCH64:-} ;;
    *) stop "there are released binaries for x86_64 and aarch64, this machine is $(uname -m); give the input 'binary'" ;;
  esac
  [[ "$sum" =~ ^[0-9a-f]{64}$ ]] || stop "the checksum of $file is '$sum'; a checksum has 64 digits of 0-9 and a-f"
  folder=$(mktemp -d "$RUNNER_TEMP/gpu-validator.XXXXXX")
  path="$folder/gpu-validator"
  curl --silent --show-error --fail --location --retry 3 --max-time 120 --output "$path" \
    "$INPUT_RELEASES_URL/v$INPUT_VERSION/$file" || stop "gpu-validator $INPUT_VERSION could not be downloaded from $INPUT_RELEASES_URL"
  echo "$sum  $path" | sha256sum --check --status || stop "the gpu-validator that was downloaded has another checksum than sha256 says; it was not run"
  chmod +x "$path"
  binary=$path
}

binary=$(command -v -- "$INPUT_BINARY") || binary=
if [ -n "$INPUT_SHA256${INPUT_SHA256_AARCH64:-}" ] && { [ -z "$binary" ] || [ "$(version_of "$binary")" != "$INPUT_VERSION" ]; }; then
  download
fi
[ -n "$binary" ] || stop "no program '$INPUT_BINARY' on this runner; bake gpu-validator into its image, give the input 'binary', or 'version' and 'sha256'"

if [ -n "$INPUT_VERSION" ]; then
  version=$(version_of "$binary") || stop "$binary does not tell its version"
  [ "$version" = "$INPUT_VERSION" ] || stop "$binary is version '$version'; the workflow asks for '$INPUT_VERSION'"
fi

# A folder of this run alone: a report that is found there cannot be another run's.
report=$(mktemp -d "$RUNNER_TEMP/gpu-validation.XXXXXX")
output report "$report"
metrics=$(mktemp "$RUNNER_TEMP/gpu-validation-metrics.XXXXXX")
trap 'rm -f -- "$metrics"' EXIT

arguments=(
  run
  --level "$INPUT_LEVEL"
  --junit "$report/report.xml"
  --html "$report/report.html"
  --json "$report/report.json"
  --facts "$report/facts.json"
  --metrics "$metrics"
  --github=true
)
if [ -n "$INPUT_PROFILE" ]; then
  arguments+=(--profile "$INPUT_PROFILE")
fi
if [ "$INPUT_ALLOW_SIMULATED" = true ]; then
  arguments+=(--simulated-ok)
else
  arguments+=(--forbid-simulated)
fi

exit_code=0
"$binary" "${arguments[@]}" || exit_code=$?
output exit-code "$exit_code"

case "$exit_code" in
  0) verdict=pass ;;
  1) verdict=fail ;;
  2) verdict=not_judged ;;
  3) verdict=bad_input ;;
  4) verdict=busy ;;
  *) stop "$binary ended with exit code $exit_code, which is none of its own: it was killed or could not start" ;;
esac

# The exit code is believed only together with a report that says the same; bad input leaves none.
if [ "$verdict" = bad_input ]; then
  echo "::error title=gpu-validator::the profile or the arguments are wrong, nothing was judged; the log says why"
else
  reported=$(awk '$1 == "gpu_validator_exit_code" { print $2 }' "$metrics")
  [ "$reported" = "$exit_code" ] || stop "$binary ended with exit code $exit_code, its report says '$reported'"
  coverage=$(awk '
    $1 ~ /^gpu_validator_test_cases\{/ {
      total += $2
      if ($1 ~ /verdict="(pass|warn|fail)"/) judged += $2
    }
    END { printf "%d/%d", judged, total }' "$metrics")
  output coverage "$coverage"
fi
output verdict "$verdict"

case "$INPUT_FAIL_ON:$verdict" in
  *:pass) ;;
  not-judged:busy | fail:busy | fail:not_judged)
    echo "::warning title=gpu-validator::the verdict is $verdict, which is no pass; fail-on is $INPUT_FAIL_ON, so the job goes on"
    ;;
  *) exit 1 ;;
esac
