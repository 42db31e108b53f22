package main

import (
	"fmt"
	"regexp"
	"slices"
	"sort"
	"strings"

	"github.com/hashicorp/terraform-plugin-go/tfprotov5"
	"github.com/hashicorp/terraform-plugin-go/tftypes"
)

// What the AWS provider, or EC2 and EKS themselves, refuse in resources that the schema alone permits. Each rule names its
// source. An unknown value is not judged, as the AWS provider does it.
var refusals = map[string][]func(config tftypes.Value) []string{
	"aws_launch_template": {tagKeysOfInstanceMetadata},
	"aws_iam_role":        {roleName},
	"aws_eks_node_group":  {autoscalerTags},
}

// With instance_metadata_tags EC2 refuses every instance that has a tag key out of this pattern. The texts are EC2's:
// terraform-aws-modules/terraform-aws-eks issue 1785 (2022-01-18), eksctl-io/eksctl issue 8446 (2025-07-16).
var metadataTagKey = regexp.MustCompile(`^[0-9a-zA-Z\-_+=,.@:]{1,255}$`)

func tagKeysOfInstanceMetadata(config tftypes.Value) []string {
	enabled := false
	for _, options := range blocks(config, "metadata_options") {
		enabled = enabled || text(options, "instance_metadata_tags") == "enabled"
	}
	if !enabled {
		return nil
	}
	var found []string
	for _, specification := range blocks(config, "tag_specifications") {
		for _, key := range keys(specification, "tags") {
			if !metadataTagKey.MatchString(key) || slices.Contains([]string{".", "..", "_index"}, key) {
				found = append(found, fmt.Sprintf(
					"'%s' is not a valid tag key. Tag keys must match pattern ([0-9a-zA-Z\\-_+=,.@:]{1,255}), and must not be a reserved name ('.', '..', '_index')", key))
			}
		}
	}
	sort.Strings(found)
	return slices.Compact(found)
}

// hashicorp/terraform-provider-aws v6.25.0, internal/service/iam/role.go (roleNameMaxLen, validResourceName).
const roleNameMaximum = 64

var roleNamePattern = regexp.MustCompile(`^[\w+=,.@-]*$`)

func roleName(config tftypes.Value) []string {
	name := text(config, "name")
	if len(name) > roleNameMaximum {
		return []string{fmt.Sprintf("expected length of name to be in the range (1 - %d), got %s", roleNameMaximum, name)}
	}
	if !roleNamePattern.MatchString(name) {
		return []string{"invalid value for name (must match [\\w+=,.@-])"}
	}
	return nil
}

// A resource has at most 50 tags, and a key 128 characters: EC2 User Guide, "Tag restrictions"; EKS User Guide, "Tag restrictions".
const (
	tagsMaximum   = 50
	tagKeyMaximum = 128
)

func autoscalerTags(config tftypes.Value) []string {
	var found []string
	all := keys(config, "tags")
	if len(all) > tagsMaximum {
		found = append(found, fmt.Sprintf("a node group has at most %d tags, got %d", tagsMaximum, len(all)))
	}
	for _, key := range all {
		if len(key) > tagKeyMaximum {
			found = append(found, fmt.Sprintf("a tag's key has at most %d characters, got '%s'", tagKeyMaximum, key))
		}
	}
	sort.Strings(found)
	return found
}

func (p *provider) refused(request *tfprotov5.ValidateResourceTypeConfigRequest) ([]*tfprotov5.Diagnostic, error) {
	rules := refusals[request.TypeName]
	if len(rules) == 0 {
		return nil, nil
	}
	config, err := request.Config.Unmarshal(p.schema.ResourceSchemas[request.TypeName].ValueType())
	if err != nil {
		return nil, err
	}
	var diagnostics []*tfprotov5.Diagnostic
	for _, rule := range rules {
		for _, detail := range rule(config) {
			diagnostics = append(diagnostics, &tfprotov5.Diagnostic{
				Severity: tfprotov5.DiagnosticSeverityError,
				Summary:  "AWS refuses this " + strings.TrimPrefix(request.TypeName, "aws_"),
				Detail:   detail,
			})
		}
	}
	return diagnostics, nil
}

// attribute gives an attribute or block of an object; a null one where it is absent or not yet known.
func attributeOf(object tftypes.Value, name string) tftypes.Value {
	if object.IsNull() || !object.IsFullyKnown() && !object.IsKnown() {
		return tftypes.Value{}
	}
	attributes := map[string]tftypes.Value{}
	if err := object.As(&attributes); err != nil {
		return tftypes.Value{}
	}
	return attributes[name]
}

func text(object tftypes.Value, name string) string {
	value := attributeOf(object, name)
	if value.Type() == nil || value.IsNull() || !value.IsKnown() {
		return ""
	}
	var found string
	if err := value.As(&found); err != nil {
		return ""
	}
	return found
}

func blocks(object tftypes.Value, name string) []tftypes.Value {
	value := attributeOf(object, name)
	if value.Type() == nil || value.IsNull() || !value.IsKnown() {
		return nil
	}
	var found []tftypes.Value
	if err := value.As(&found); err != nil {
		return nil
	}
	return found
}

func keys(object tftypes.Value, name string) []string {
	value := attributeOf(object, name)
	if value.Type() == nil || value.IsNull() || !value.IsKnown() {
		return nil
	}
	entries := map[string]tftypes.Value{}
	if err := value.As(&entries); err != nil {
		return nil
	}
	found := make([]string, 0, len(entries))
	for key := range entries {
		found = append(found, key)
	}
	return found
}
