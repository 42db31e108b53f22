# shellcheck shell=sh disable=SC2086 # $sudo is empty or two words
# Runs the validator in its folder, leaves its process id for the keeper, and passes its exit code on.
cd -- "$1" || exit 125
sudo=$2
[ "$(id -u)" = 0 ] && sudo=
shift 2
$sudo sh -c "echo \$\$ >pid && exec \"\$@\"" sh "$PWD/gpu-validator" "$@"
code=$?
rm -f pid
exit "$code"
