"""One settings class per algorithm; settings.algorithm names them all."""
