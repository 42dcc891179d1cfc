
#compdef slimectl

_slimectl_completion() {
  eval $(env _TYPER_COMPLETE_ARGS="${words[1,$CURRENT]}" _SLIMECTL_COMPLETE=complete_zsh slimectl)
}

compdef _slimectl_completion slimectl

