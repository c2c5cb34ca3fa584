//! exp, tanh, sigmoid, softplus: one polynomial each, over [`super::lanes::Lanes`].
