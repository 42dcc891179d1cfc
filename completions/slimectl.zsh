#compdef slimectl
# zsh, after compinit: source <(slimectl completion zsh)
_slimectl() {
    local line word text
    local -a words_only words_shown keys_only keys_shown
    local typed="${(j: :)${(@)words[1,CURRENT-1]}} $PREFIX"
    while IFS=$'\t' read -r word text; do
        if [[ $word == *[=:/] ]]; then
            keys_only+=("$word") keys_shown+=("$word  $text")
        else
            words_only+=("$word") words_shown+=("$word  $text")
        fi
    done < <(_SLIMECTL_COMPLETE=zsh _SLIMECTL_LINE="$typed" ${words[1]} 2>/dev/null)
    if (( ! ${#keys_only} && ! ${#words_only} )); then
        _files
        return
    fi
    # What follows a key, a kind or a folder stands there without a space.
    (( ${#keys_only} )) && compadd -S '' -ld keys_shown -- "${keys_only[@]}"
    (( ${#words_only} )) && compadd -ld words_shown -- "${words_only[@]}"
    return 0
}
compdef _slimectl slimectl
