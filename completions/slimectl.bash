# bash: source <(slimectl completion bash)
_slimectl() {
    local IFS=$'\n'
    COMPREPLY=($(_SLIMECTL_COMPLETE=bash _SLIMECTL_LINE="${COMP_LINE:0:COMP_POINT}" "$1" 2>/dev/null))
    # What follows a key, a kind or a folder stands there without a space.
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=:/] ]] && compopt -o nospace
    return 0
}
complete -o default -F _slimectl slimectl
