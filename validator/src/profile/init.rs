use crate::facts::Facts;
pub fn init(_: &Facts) -> String {
    String::new()
}
