# shellcheck shell=sh disable=SC2086 # $sudo is empty or two words
# Prints every report that is there: a line with its name and size, then its bytes.
cd -- "$1/reports" || exit 125
sudo=$2
[ "$(id -u)" = 0 ] && sudo=
shift 2
for name; do
  $sudo test -f "$name" || continue
  size=$($sudo stat -c %s -- "$name") || exit 1
  printf "%s %s\n" "$name" "$size"
  $sudo head -c "$size" -- "$name" || exit 1
done
