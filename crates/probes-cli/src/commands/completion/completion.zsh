#compdef ocaml-probes
# Completion of ocaml-probes for zsh. ocaml-probes says itself what can come next.

_ocaml_probes() {
	local line value meaning
	local -a before values shown parts part_shown
	before=("${(@Q)words[1,CURRENT-1]}")
	for line in "${(@f)$("${(@)before[1]}" completion -answer -- "${(@)before[2,-1]}" "${(Q)PREFIX}" 2>/dev/null)}"; do
		value=${line%%$'\t'*}
		meaning=${line#*$'\t'}
		if [[ -z $value ]]; then
			if [[ $meaning == files ]]; then
				# What comes before the value stays.
				compset -P '-*='
				_files
				return
			fi
			continue
		fi
		# More follows after a dot.
		if [[ $value == *. ]]; then
			parts+=("$value")
			part_shown+=("$value")
		else
			values+=("$value")
			shown+=("$value${meaning:+  -- $meaning}")
		fi
	done
	compadd -l -d shown -a values
	compadd -S '' -d part_shown -a parts
}

if [[ $zsh_eval_context[-1] == loadautofunc ]]; then
	_ocaml_probes "$@"
else
	compdef _ocaml_probes ocaml-probes
fi
