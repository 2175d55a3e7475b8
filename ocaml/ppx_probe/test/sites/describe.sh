# describe.sh TYPE PROGRAM: prints one line for each note of the program, from
# readelf, gdb, objdump and addr2line: name, file:line, function, state.
# Everything that must hold for every site is checked here, not printed.
set -eu
type=$1 program=$2

fail() {
  echo "$program: $*" >&2
  exit 1
}

bytes() { # bytes ADDRESS LENGTH: in hex, without spaces
  objdump -s -j .text --start-address="$1" --stop-address=$(($1 + $2)) "$program" |
    awk '/^ [0-9a-f]+ / { for (i = 2; i <= NF && $i ~ /^[0-9a-f]+$/ && n < 2 * LENGTH; i++) { printf "%s", $i; n += length($i) } }' LENGTH="$2"
}

rel32() { # little-endian hex -> signed
  set -- "$(echo "$1" | sed 's/\(..\)\(..\)\(..\)\(..\)/0x\4\3\2\1/')"
  echo $((($1 ^ 0x80000000) - 0x80000000))
}

readelf -h "$program" | grep -q "Type: *$type " || fail "is not $type"
! readelf -lW "$program" | grep -q 'LOAD.*RWE' || fail "has writable code"
readelf -SW "$program" | grep -q ' \.probes  *PROGBITS .* WA .* 2$' ||
  fail "no section .probes, PROGBITS, WA, align 2"

base=0x$(readelf -SW "$program" | sed -n 's/.* \.stapsdt\.base *PROGBITS *\([0-9a-f]*\) .*/\1/p')

notes=$(readelf -n "$program" | awk '
  /Provider: / { provider = $2 }
  /Name: / { name = $2 }
  /Location: / { gsub(",", ""); print provider, name, $2, $4, $6 }')

gdb_lines=$(gdb -batch -nx -ex 'info probes stap ocaml_2' "$program" | grep -c '^stap ')
[ "$gdb_lines" -eq "$(echo "$notes" | wc -l)" ] || fail "gdb sees $gdb_lines notes"

echo "$notes" | while read -r provider name pc note_base semaphore; do
  [ "$provider" = ocaml_2 ] || fail "$name: provider $provider"
  [ $((note_base)) -eq $((base)) ] || fail "$name: base $note_base"
  symbol=$(readelf -sW "$program" | awk -v a="$(printf '%016x' $((semaphore)))" \
    '$2 == a && $8 ~ /^caml_probes_semaphore_/ { print $3, $4, $8 }')
  [ "$symbol" = "4 OBJECT caml_probes_semaphore_$name" ] ||
    fail "$name: semaphore $semaphore is '$symbol'"
  if [ $((pc)) -eq 0 ]; then
    echo "$name - - no site"
    continue
  fi
  site=$(bytes "$pc" 7)
  wrapper=$((pc + 6 + $(rel32 "$(echo "$site" | cut -c 5-12)")))
  [ "$(bytes $wrapper 6)" = b803000000c3 ] || fail "$name: no wrapper at $wrapper"
  case $site in
    903d????????c3) state=disabled ;;
    90e8????????c3) state=enabled ;;
    *) fail "$name: site $site" ;;
  esac
  addr2line -f -s -e "$program" "$pc" | {
    read -r function
    read -r line
    echo "$name $line $(echo "$function" | sed 's/_[0-9]*$//') $state"
  }
done | LC_ALL=C sort
