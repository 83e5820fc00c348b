//! What our programs have in common at the terminal: how they print ([`output`]), fail
//! ([`failure`]), read an environment ([`env`]) and connect to a program elsewhere ([`stdio`]).

pub mod env;
pub mod failure;
pub mod output;
pub mod stdio;
